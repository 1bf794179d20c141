"""A report as text for a terminal, JSON, HTML or SARIF."""
