"""What a provider would reach: placements as tables, and forecasts from measured products and a link."""
