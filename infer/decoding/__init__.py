"""Reads pictures and videos; every command, service and page uses it and gets the same pixels."""
