"""All code that imports Ray: joining a cluster, workers that run tasks, and objects that live in actors."""
