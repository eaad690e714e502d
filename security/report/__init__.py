"""The page, its pictures, and the environment of an audit."""
