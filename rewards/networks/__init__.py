"""Networks behind rewards: how they are loaded, their features and heads."""
