"""Combat between two teams, with the interface of SMAC and the random battles of SMACv2."""
