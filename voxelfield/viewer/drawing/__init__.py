"""From a viewpoint and settings to a picture, without a browser."""
