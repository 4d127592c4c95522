"""The page in the browser, made with viser."""
