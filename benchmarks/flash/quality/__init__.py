"""Quality of models of which a token is computed with few neurons."""
