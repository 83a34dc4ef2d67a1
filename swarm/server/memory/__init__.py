"""What peers make a server allocate: charged before it is allocated, by peer and in all."""
