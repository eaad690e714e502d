"""Plans of a provider: placements as tables, and forecasts from measured products and a link."""
