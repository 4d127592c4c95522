"""Who may use the page, and what a browser may ask for."""
