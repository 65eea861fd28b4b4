"""Records in; tables, pages and traces out. Nothing here runs anything."""
