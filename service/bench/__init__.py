"""`tierkv bench`: what this machine gives and what tierkv makes of it, measured side by side in one run."""
