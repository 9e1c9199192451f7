"""First configurations, and those of other toolkits translated; published prompt sets."""
