package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	rocketmq "github.com/apache/rocketmq-client-go/v2"
	"github.com/apache/rocketmq-client-go/v2/admin"
	"github.com/apache/rocketmq-client-go/v2/consumer"
	"github.com/apache/rocketmq-client-go/v2/primitive"
	"github.com/apache/rocketmq-client-go/v2/producer"
)

// World is one scenario's servers and topic, and its clients, which are closed at its end.
type World struct {
	resolver primitive.NsResolver
	broker   string
	topic    string
	admin    admin.Admin
	closing  []func()
}

func newWorld(nameServer, broker, topic string) *World {
	resolver := primitive.NewPassthroughResolver([]string{nameServer})
	tool := must(admin.NewAdmin(admin.WithResolver(resolver)))
	world := &World{resolver: resolver, broker: broker, topic: topic, admin: tool}
	world.closing = append(world.closing, func() { tool.Close() })
	return world
}

func (w *World) close() {
	for _, closing := range slices.Backward(w.closing) {
		closing()
	}
}

// create makes a topic, and waits until the name server tells its route.
func (w *World) create(topic string, options ...admin.OptionCreate) {
	settings := append([]admin.OptionCreate{
		admin.WithTopicCreate(topic), admin.WithBrokerAddrCreate(w.broker),
		admin.WithReadQueueNums(queues), admin.WithWriteQueueNums(queues),
	}, options...)
	must0(w.admin.CreateTopic(background(), settings...))
	w.await("a route of "+topic, func() bool {
		found, err := w.admin.FetchPublishMessageQueues(background(), topic)
		return err == nil && len(found) == queues
	})
}

func (w *World) await(what string, condition func() bool) {
	deadline := time.Now().Add(patient)
	for !condition() {
		if time.Now().After(deadline) {
			panic(fmt.Sprintf("no %s within %s", what, patient))
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (w *World) producer(group string, options ...producer.Option) rocketmq.Producer {
	settings := append([]producer.Option{
		producer.WithNsResolver(w.resolver), producer.WithGroupName(w.topic + group),
		producer.WithInstanceName(w.topic + group), producer.WithSendMsgTimeout(patient),
	}, options...)
	made := must(rocketmq.NewProducer(settings...))
	must0(made.Start())
	w.closing = append(w.closing, func() { made.Shutdown() })
	return made
}

// Seen is what a listener was given, in the order it came.
type Seen struct {
	sync.Mutex
	messages []*primitive.MessageExt
}

func (s *Seen) all() []*primitive.MessageExt {
	s.Lock()
	defer s.Unlock()
	return slices.Clone(s.messages)
}

func (s *Seen) add(messages []*primitive.MessageExt) {
	s.Lock()
	defer s.Unlock()
	s.messages = append(s.messages, messages...)
}

func (s *Seen) bodies() []string {
	bodies := []string{}
	for _, seen := range s.all() {
		bodies = append(bodies, string(seen.Body))
	}
	return bodies
}

type listener = func(*primitive.MessageExt) consumer.ConsumeResult

func succeed(*primitive.MessageExt) consumer.ConsumeResult { return consumer.ConsumeSuccess }

// consume starts a push consumer that begins at the first message.
func (w *World) consume(
	group string, selector consumer.MessageSelector, listen listener, options ...consumer.Option,
) (*Seen, func()) {
	settings := append([]consumer.Option{
		consumer.WithNsResolver(w.resolver), consumer.WithGroupName(w.topic + group),
		consumer.WithInstance(w.topic + group), consumer.WithConsumeFromWhere(consumer.ConsumeFromFirstOffset),
	}, options...)
	made := must(rocketmq.NewPushConsumer(settings...))
	seen := &Seen{}
	handle := func(_ context.Context, messages ...*primitive.MessageExt) (consumer.ConsumeResult, error) {
		seen.add(messages)
		return listen(messages[0]), nil
	}
	must0(made.Subscribe(w.topic, selector, handle))
	must0(made.Start())
	stop := sync.OnceFunc(func() { made.Shutdown() })
	w.closing = append(w.closing, stop)
	return seen, stop
}

func everything() consumer.MessageSelector { return consumer.MessageSelector{} }

func (w *World) wait(seen *Seen, count int) []*primitive.MessageExt {
	w.await(fmt.Sprintf("%d messages of %s", count, w.topic), func() bool { return len(seen.all()) >= count })
	return seen.all()
}

// properties are the names of a message's properties.
func properties(of *primitive.MessageExt) string {
	return strings.Join(slices.Sorted(maps.Keys(of.GetProperties())), " ")
}

func sorted(texts []string) []string {
	slices.Sort(texts)
	return texts
}
