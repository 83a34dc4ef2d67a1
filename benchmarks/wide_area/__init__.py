"""Generation over the Internet, in a laboratory: links with delay, jitter, a rate, loss and stalls."""
