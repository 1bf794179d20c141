"""What traffic and prompts say about a cache: estimates and reports beside the data path."""
