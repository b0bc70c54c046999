"""The one reader of pictures and videos: every command, service and page sees the same pixels of a file."""
