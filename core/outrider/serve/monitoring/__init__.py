"""What operators watch: metrics, request spans, log formats and events of the prefix cache."""
