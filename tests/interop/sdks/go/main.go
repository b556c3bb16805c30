// Apache's Go SDK for gRPC, unmodified: the scenarios of tests/interop/sdks, and as JSON what came of each as soon as it is known.
//
//	sdk HOST:PORT PREFIX SCENARIO...
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	rmq "github.com/apache/rocketmq-clients/golang/v5"
	"github.com/apache/rocketmq-clients/golang/v5/credentials"
)

const (
	patient   = 100 * time.Second
	request   = 10 * time.Second
	await     = 5 * time.Second
	invisible = 60 * time.Second
	inArchive = 60
)

// Facts is what a scenario found.
type Facts map[string]any

var everything = rmq.NewFilterExpression("*")

var scenarios = map[string]func() Facts{
	"plain": plain, "invisible": invisibly, "filters": filters, "fifo": fifo, "delay": delay,
	"transaction": transaction, "retries": retries, "refused": refused, "crossed": crossed, "load": load,
	"archived": archived,
}

func main() {
	var all sync.WaitGroup
	for _, name := range os.Args[3:] {
		all.Add(1)
		go func() {
			defer all.Done()
			tell(name, run(scenarios[name]))
		}()
	}
	all.Wait()
}

func tell(name string, facts any) { fmt.Println(string(must(json.Marshal([]any{name, facts})))) }

func run(scenario func() Facts) (facts Facts) {
	defer func() {
		if problem := recover(); problem != nil {
			facts = Facts{"error": fmt.Sprint(problem)}
		}
	}()
	return scenario()
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

func named(name string) string { return os.Args[2] + "-" + name }

func config(group string) *rmq.Config {
	return &rmq.Config{Endpoint: os.Args[1], ConsumerGroup: group, Credentials: &credentials.SessionCredentials{}}
}

// Member is one that came: its body and the attempt, as JSON an array.
type Member struct {
	body    string
	attempt int32
}

func (m Member) MarshalJSON() ([]byte, error) { return json.Marshal([]any{m.body, m.attempt}) }

// Listener notes what comes; "fails" always fails, "fails once" at the first attempt.
type Listener struct {
	lock   sync.Mutex
	came   []Member
	failed bool
}

func (l *Listener) consume(message *rmq.MessageView) rmq.ConsumerResult {
	l.lock.Lock()
	defer l.lock.Unlock()
	body := string(message.GetBody())
	l.came = append(l.came, Member{body, message.GetDeliveryAttempt()})
	isFailure := body == "fails" || body == "fails once" && !l.failed
	l.failed = l.failed || body == "fails once"
	if isFailure {
		return rmq.FAILURE
	}
	return rmq.SUCCESS
}

// until is what came, as soon as a condition holds for it, or at last.
func (l *Listener) until(condition func([]Member) bool) []Member {
	deadline := time.Now().Add(patient)
	for {
		l.lock.Lock()
		came := slices.Clone(l.came)
		l.lock.Unlock()
		if condition(came) || time.Now().After(deadline) {
			return came
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// untilBodies is the bodies that came: a broker may send one again before it has noted an answer.
func (l *Listener) untilBodies(wanted ...string) []string {
	return bodies(l.until(func(came []Member) bool {
		found := bodies(came)
		return !slices.ContainsFunc(wanted, func(one string) bool { return !slices.Contains(found, one) })
	}))
}

func bodies(came []Member) []string {
	found := []string{}
	for _, one := range came {
		found = append(found, one.body)
	}
	slices.Sort(found)
	return slices.Compact(found)
}

func made(topic, body string, set ...func(*rmq.Message)) *rmq.Message {
	message := &rmq.Message{Topic: named(topic), Body: []byte(body)}
	for _, one := range set {
		one(message)
	}
	return message
}

func inGroup(message *rmq.Message) { message.SetMessageGroup("g") }

func due(at time.Time) func(*rmq.Message) {
	return func(message *rmq.Message) { message.SetDelayTimestamp(at) }
}

func producer(topic string, options ...rmq.ProducerOption) rmq.Producer {
	started := must(rmq.NewProducer(config(""), append(options, rmq.WithTopics(named(topic)))...))
	started.SetRequestTimeout(request)
	must0(started.Start())
	return started
}

func send(producer rmq.Producer, message *rmq.Message) *rmq.SendReceipt {
	return must(producer.Send(context.Background(), message))[0]
}

func simple(group, topic string, filter *rmq.FilterExpression) rmq.SimpleConsumer {
	started := must(rmq.NewSimpleConsumer(config(named(group)), rmq.WithSimpleAwaitDuration(await),
		rmq.WithSimpleSubscriptionExpressions(map[string]*rmq.FilterExpression{topic: filter})))
	started.SetRequestTimeout(request)
	must0(started.Start())
	return started
}

func push(group, topic string, consume func(*rmq.MessageView) rmq.ConsumerResult) {
	started := must(rmq.NewPushConsumer(config(named(group)),
		rmq.WithPushAwaitDuration(await), rmq.WithPushConsumptionThreadCount(4),
		rmq.WithPushSubscriptionExpressions(map[string]*rmq.FilterExpression{named(topic): everything}),
		rmq.WithPushMessageListener(&rmq.FuncMessageListener{Consume: consume})))
	started.SetRequestTimeout(request)
	must0(started.Start())
}

// received is as many messages, acknowledged or not. The SDK tells "nothing there" as an error.
func received(consumer rmq.SimpleConsumer, count int, acknowledge bool) []*rmq.MessageView {
	found := []*rmq.MessageView{}
	for deadline := time.Now().Add(patient); len(found) < count && time.Now().Before(deadline); {
		messages, err := consumer.Receive(context.Background(), 32, invisible)
		if err != nil && !strings.Contains(err.Error(), "MESSAGE_NOT_FOUND") && !strings.Contains(err.Error(), "40401") {
			panic(err)
		}
		for _, message := range messages {
			if acknowledge {
				must0(consumer.Ack(context.Background(), message))
			}
			found = append(found, message)
		}
	}
	return found
}

func texts(messages []*rmq.MessageView) []string {
	came := []Member{}
	for _, message := range messages {
		came = append(came, Member{body: string(message.GetBody())})
	}
	return bodies(came)
}

// deadLetters waits for a topic that is there with its first message.
func deadLetters(group string) []string {
	topic := "%DLQ%" + named(group)
	for deadline := time.Now().Add(patient); ; time.Sleep(100 * time.Millisecond) {
		consumer := must(rmq.NewSimpleConsumer(config(named("dead-"+group)), rmq.WithSimpleAwaitDuration(await),
			rmq.WithSimpleSubscriptionExpressions(map[string]*rmq.FilterExpression{topic: everything})))
		consumer.SetRequestTimeout(request)
		if err := consumer.Start(); err == nil {
			defer consumer.GracefulStop()
			return texts(received(consumer, 1, true))
		} else if time.Now().After(deadline) {
			panic(err)
		}
	}
}

func plain() Facts {
	consumer, sender := simple("plain", named("plain"), everything), producer("plain")
	receipt := send(sender, made("plain", "hello", func(message *rmq.Message) {
		message.SetTag("a")
		message.SetKeys("k1", "k2")
		message.AddProperty("x", "y")
	}))
	found := received(consumer, 1, true)[0]
	slices.Sort(found.GetKeys())
	told := []any{string(found.GetBody()), found.GetTag(), found.GetKeys(), found.GetProperties(), found.GetDeliveryAttempt()}
	must0(consumer.GracefulStop())
	must0(sender.GracefulStop())
	return Facts{"message": told, "same id": found.GetMessageId() == receipt.MessageID}
}

func invisibly() Facts {
	sender, consumer := producer("invisible"), simple("invisible", named("invisible"), everything)
	send(sender, made("invisible", "changed"))
	first := received(consumer, 1, false)[0]
	must0(consumer.ChangeInvisibleDuration(first, time.Second))
	second := received(consumer, 1, true)[0]
	attempts := []int32{first.GetDeliveryAttempt(), second.GetDeliveryAttempt()}
	return Facts{"attempts": attempts, "body": string(second.GetBody())}
}

func filters() Facts {
	sender := producer("filters")
	for _, one := range [][]string{{"one", "red", "1"}, {"two", "green", "7"}, {"three", "blue", "9"}} {
		send(sender, made("filters", one[0], func(message *rmq.Message) {
			message.SetTag(one[1])
			message.AddProperty("size", one[2])
		}))
	}
	byTag := simple("tags", named("filters"), rmq.NewFilterExpression("red || blue"))
	bySQL := simple("sql", named("filters"), rmq.NewFilterExpressionWithType("size > 5 AND TAGS <> 'blue'", rmq.SQL92))
	return Facts{"tags": texts(received(byTag, 2, true)), "sql": texts(received(bySQL, 1, true))}
}

// archived is what is in an archive and what is in the log, in the order in which it comes; and what is sent after it.
func archived() Facts {
	consumer, sender, listener := simple("archived", named("archived"), everything), producer("archived"), &Listener{}
	found := received(consumer, inArchive, true)
	send(sender, made("archived", "after"))
	ordered, pushed := []string{}, []string{}
	for _, one := range append(found, received(consumer, 1, true)...) {
		ordered = append(ordered, string(one.GetBody()))
	}
	push("archived-fifo", "archived-fifo", listener.consume)
	for _, one := range listener.until(func(came []Member) bool { return len(came) >= inArchive }) {
		pushed = append(pushed, one.body)
	}
	return Facts{"simple": ordered, "push": pushed}
}

func fifo() Facts {
	listener, sender := &Listener{}, producer("fifo")
	push("fifo", "fifo", listener.consume)
	for _, body := range []string{"f0", "f1", "fails once", "f3", "f4", "fails", "f6"} {
		send(sender, made("fifo", body, inGroup))
	}
	came := listener.until(func(came []Member) bool { return len(came) >= 9 })
	return Facts{"came": came, "dead": deadLetters("fifo")}
}

func delay() Facts {
	listener, sender := &Listener{}, producer("delay")
	push("delay", "delay", listener.consume)
	now := time.Now()
	send(sender, made("delay", "past", due(time.UnixMilli(1000))))
	recalled := send(sender, made("delay", "recalled", due(now.Add(8*time.Second))))
	answer := must(sender.Recall(context.Background(), named("delay"), recalled.RecallHandle))
	send(sender, made("delay", "due", due(now.Add(9*time.Second))))
	came := listener.untilBodies("past", "due")
	return Facts{"came": came, "early": time.Since(now) < 9*time.Second, "recalled": answer == recalled.MessageID}
}

func transaction() Facts {
	listener := &Listener{}
	asked := &Listener{}
	sender := producer("transaction", rmq.WithTransactionChecker(&rmq.TransactionChecker{
		Check: func(message *rmq.MessageView) rmq.TransactionResolution {
			asked.consume(message)
			// Who is slow may be asked before it commits.
			if body := string(message.GetBody()); body == "checked" || body == "commit" {
				return rmq.COMMIT
			}
			return rmq.ROLLBACK
		},
	}))
	push("transaction", "transaction", listener.consume)
	begin := func(body string) rmq.Transaction {
		begun := sender.BeginTransaction()
		must(sender.SendWithTransaction(context.Background(), made("transaction", body), begun))
		return begun
	}
	begin("checked")
	begin("dropped")
	must0(begin("commit").Commit())
	must0(begin("rollback").RollBack())
	came := listener.untilBodies("checked", "commit")
	return Facts{"came": came, "asked": asked.untilBodies("checked", "dropped")}
}

func retries() Facts {
	listener, sender := &Listener{}, producer("retries")
	push("retries", "retries", listener.consume)
	send(sender, made("retries", "fails once"))
	send(sender, made("retries", "fails"))
	dead := deadLetters("retries")
	came := listener.until(func(came []Member) bool { return len(came) >= 4 })
	slices.SortFunc(came, func(a, b Member) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
	return Facts{"came": came, "dead": dead}
}

func refused() Facts {
	sender, told := producer("plain"), Facts{}
	for name, message := range map[string]*rmq.Message{"type": made("plain", "x", inGroup), "topic": made("nowhere", "x")} {
		if _, err := sender.Send(context.Background(), message); err != nil {
			told[name] = err.Error()
		}
	}
	return told
}

// crossed is bodies that clients of the other protocol compressed; and a long one of ours.
func crossed() Facts {
	consumer, sender := simple("crossed", named("crossed"), everything), producer("long")
	send(sender, made("long", strings.Repeat(os.Args[2]+" ", 4000)))
	came := []Member{}
	for _, message := range received(consumer, 3, true) {
		came = append(came, Member{string(message.GetBody()[:4]), int32(len(message.GetBody()))})
	}
	slices.SortFunc(came, func(a, b Member) int { return strings.Compare(a.body, b.body) })
	return Facts{"came": came}
}

// load sends and consumes through a restart; every body is the time it was sent at, in ms.
func load() Facts {
	var lock sync.Mutex
	came := map[string]map[string]bool{"push": {}, "simple": {}}
	note := func(how string, message *rmq.MessageView) {
		lock.Lock()
		defer lock.Unlock()
		came[how][string(message.GetBody())] = true
		tell(how, string(message.GetBody()))
	}
	sender, consumer := producer("load"), simple("load-simple", named("load"), everything)
	push("load-push", "load", func(message *rmq.MessageView) rmq.ConsumerResult {
		note("push", message)
		return rmq.SUCCESS
	})
	go func() {
		for {
			messages, err := consumer.Receive(context.Background(), 32, invisible/4)
			if err != nil {
				time.Sleep(100 * time.Millisecond)
			}
			for _, message := range messages {
				note("simple", message)
				_ = consumer.Ack(context.Background(), message)
			}
		}
	}()
	stopped := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(stopped)
	}()
	answered := map[string]bool{}
	for {
		select {
		case <-stopped:
			missing := Facts{}
			for deadline := time.Now().Add(patient); ; time.Sleep(50 * time.Millisecond) {
				total := 0
				lock.Lock()
				for how := range came {
					count := 0
					for body := range answered {
						if !came[how][body] {
							count++
						}
					}
					missing[how] = count
					total += count
				}
				lock.Unlock()
				if total == 0 || time.Now().After(deadline) {
					return missing
				}
			}
		case <-time.After(100 * time.Millisecond):
			body := strconv.FormatInt(time.Now().UnixMilli(), 10)
			if _, err := sender.Send(context.Background(), made("load", body)); err == nil {
				answered[body] = true
			}
		}
	}
}
