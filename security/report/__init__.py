"""The page, its pictures, and what an audit ran on."""
