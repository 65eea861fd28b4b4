"""Runs that produce records, and what they train."""
