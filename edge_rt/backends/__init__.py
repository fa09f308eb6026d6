"""Back ends: one file each, found by name in registry.py and imported only when asked for."""
