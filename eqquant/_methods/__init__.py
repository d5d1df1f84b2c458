"""How codes are found: one method per file."""
