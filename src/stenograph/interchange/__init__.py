"""Runs as files that others read: rows out of the record, and the record out of rows."""
