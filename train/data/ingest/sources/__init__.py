"""Sources of clips: folders, tables, tar files and downloads, listed as rows."""
