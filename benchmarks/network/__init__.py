"""What the network costs: delays with push, lost servers, wire formats, and planning of routes."""
