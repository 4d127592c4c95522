"""Walking through a field in a browser: what draws, what decides when and how finely, and the page itself."""
