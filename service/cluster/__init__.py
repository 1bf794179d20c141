"""What daemons ask each other: signed requests between nodes that have the same server secret."""
