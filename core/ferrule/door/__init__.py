"""The thread of the launcher that accepts connections and answers probes."""
