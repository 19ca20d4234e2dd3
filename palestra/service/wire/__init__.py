"""The wire of the service: schemas, protobuf messages, codec, validation, and the jobs that they become."""
