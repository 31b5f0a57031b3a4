"""`bigpool tune`: times launch configurations of a card in turn, and writes down those that beat the rule."""
