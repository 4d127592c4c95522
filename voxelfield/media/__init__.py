"""Images and videos as files."""
