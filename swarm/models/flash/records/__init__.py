"""Records: what is needed together, side by side in files and in memory."""
