"""Daemons in network namespaces that share blocks through real servers, while these and the network fail."""
