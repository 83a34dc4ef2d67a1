"""What a token costs on flash, before it is computed.

cost_model     bytes and seconds of an iteration, and what follows from them (pure)
flash_choice   whether more blocks on flash are a gain for the swarm (pure)
planned_costs  what blocks will cost, before anything is loaded (pure)
compute_speed  how fast this machine multiplies, measured
"""
