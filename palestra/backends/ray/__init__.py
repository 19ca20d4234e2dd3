"""The only room that knows Ray: the cluster, workers that do tasks, and objects that live in actors."""
