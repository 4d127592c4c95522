"""Validated settings: dataclasses whose annotations define the allowed values, and their construction from mappings."""
