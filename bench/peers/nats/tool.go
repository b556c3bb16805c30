//go:build tool

// Package tool names the server that go.sum pins.
package tool

import _ "github.com/nats-io/nats-server/v2"
