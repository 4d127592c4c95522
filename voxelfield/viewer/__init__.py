"""Exploring a field in a browser: pictures, the thread that draws them, and the page, which is made with viser."""
