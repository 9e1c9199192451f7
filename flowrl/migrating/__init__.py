"""First configurations, and those of other toolkits translated."""
