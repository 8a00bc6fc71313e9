"""The page that `infer serve` shows at `/`: its scripts, its style and its icon."""
