"""Rewards that ask a vision-language model: how it is reached, what it is asked, what its answers are worth."""
