"""What every side needs: errors, files, progress, commands. Imports nothing of ours."""
