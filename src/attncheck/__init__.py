"""attncheck."""
