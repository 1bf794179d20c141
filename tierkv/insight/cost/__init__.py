"""`tierkv cost`: a trace of requests at flat prices, with a provider's cache, and on hardware of one's own."""
