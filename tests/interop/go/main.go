// Every kind of send and of consumer of Apache's Go client, against one name server: what came of each, as JSON.
//
//	goclient NAME_SERVER BROKER PREFIX [SCENARIO...]
//
// Topics and groups are called PREFIX-SCENARIO. Scenarios run at the same time; one that fails tells its error.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/rlog"
)

const (
	queues = 4
	// Longer than Apache's broker keeps a member that has left, 130 s, where it carries out a heartbeat of it after its
	// farewell; until then a later run has half of the queues. The client looks at its group every 20 s.
	patient = 250 * time.Second
)

// Facts is what a scenario found: by name, anything that JSON can tell.
type Facts map[string]any

var scenarios = map[string]func(*World) Facts{
	"admin":       administer,
	"sends":       sendEveryWay,
	"filters":     filter,
	"orderly":     consumeInOrder,
	"delayed":     delay,
	"retried":     retryToDeadLetters,
	"transaction": transact,
	"pulled":      pull,
	"broadcast":   broadcast,
	"request":     request,
	"traced":      trace,
	"refused":     refuse,
}

// later is what only runs that name it do.
var later = map[string]func(*World) Facts{"again": again, "stay": stay}

func prefix() string { return os.Args[3] }

func main() {
	if os.Getenv("ROCKETMQ_GO_LOG_LEVEL") == "" {
		rlog.SetLogLevel("fatal")
	}
	names := os.Args[4:]
	if len(names) == 0 {
		for name := range scenarios {
			names = append(names, name)
		}
	}
	told := Facts{}
	var lock sync.Mutex
	var all sync.WaitGroup
	for _, name := range names {
		all.Add(1)
		go func() {
			defer all.Done()
			facts := run(name)
			lock.Lock()
			defer lock.Unlock()
			told[name] = facts
		}()
	}
	all.Wait()
	must0(json.NewEncoder(os.Stdout).Encode(told))
}

func run(name string) (facts Facts) {
	world := newWorld(os.Args[1], os.Args[2], prefix()+"-"+name)
	defer func() {
		if problem := recover(); problem != nil {
			facts = Facts{"error": fmt.Sprint(problem)}
		}
		world.close()
	}()
	if scenario, found := scenarios[name]; found {
		return scenario(world)
	}
	return later[name](world)
}

func must[T any](value T, err error) T {
	must0(err)
	return value
}

func must0(err error) {
	if err != nil {
		panic(err)
	}
}

func background() context.Context { return context.Background() }

func message(topic, body string) *primitive.Message { return primitive.NewMessage(topic, []byte(body)) }
