"""Rows in; table, figure and page out. Nothing here measures, and nothing here starts an engine."""
