"""Where released records go. One narrow interface; off and fan-out are sinks too."""
