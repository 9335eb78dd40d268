"""How ranks start, find each other and tell how they are."""
