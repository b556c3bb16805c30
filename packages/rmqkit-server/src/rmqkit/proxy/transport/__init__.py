"""gRPC calls over HTTP/2: frames, header blocks, flow control, deadlines."""
