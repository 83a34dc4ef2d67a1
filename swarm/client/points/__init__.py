"""The points that a client spends, and the tabs that it signs for what it was served."""
