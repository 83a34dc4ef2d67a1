"""Who holds what in a closed group of devices: from their memory, speed and links to the blocks of each."""
