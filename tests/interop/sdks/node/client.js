'use strict';
// Apache's Node SDK for gRPC, unmodified: the scenarios of tests/interop/sdks, and as JSON what came of each as soon as it is known.
//
//     node client.js HOST:PORT PREFIX SCENARIO...
//
// A client of version 1.0.8 has one topic: with several it misses its settings if they come before it looks for them.
const { setTimeout: sleep } = require('node:timers/promises');
const { ConsumeResult, FilterExpression, Producer, PushConsumer, SimpleConsumer } = require('rocketmq-client-nodejs');
const { FilterType, TransactionResolution } = require('rocketmq-client-nodejs/proto/apache/rocketmq/v2/definition_pb');

const [ endpoints, prefix, ...wanted ] = process.argv.slice(2);
const PATIENT_MS = 100000;
const INVISIBLE_MS = 60000;
const ARCHIVED = 60;
const LOAD_INVISIBLE_MS = 15000;
const silent = { debug() {}, info() {}, warn() {}, error() {} };
const common = { endpoints, namespace: '', logger: silent, requestTimeout: 10000 };
const everything = new FilterExpression('*');

const named = name => `${prefix}-${name}`;

// Notes what comes; "fails" always fails, "fails once" at the first attempt.
class Listener {
  came = [];
  #failed = false;

  async consume(message) {
    const body = message.body.toString();
    this.came.push([ body, message.deliveryAttempt ]);
    const isFailure = body === 'fails' || (body === 'fails once' && !this.#failed);
    this.#failed ||= body === 'fails once';
    return isFailure ? ConsumeResult.FAILURE : ConsumeResult.SUCCESS;
  }

  // What came, as soon as the condition holds for it, or at last.
  async until(condition) {
    await waitFor(() => condition(this.came));
    return [ ...this.came ];
  }

  // The bodies that came: a broker may send one again before it has noted an answer.
  async untilBodies(...bodies) {
    const found = () => [ ...new Set(this.came.map(([ body ]) => body)) ].sort();
    await this.until(() => bodies.every(body => found().includes(body)));
    return found();
  }
}

async function waitFor(condition) {
  const deadline = Date.now() + PATIENT_MS;
  while (!condition() && Date.now() < deadline) await sleep(20);
}

const made = (topic, body, more = {}) => ({ topic: named(topic), body: Buffer.from(body), ...more });

async function started(client) {
  await client.startup();
  return client;
}

const producer = (topic, more = {}) => started(new Producer({ ...common, topics: [ named(topic) ], ...more }));

const simple = (group, topic, filter = everything) => started(new SimpleConsumer({
  ...common, consumerGroup: named(group), awaitDuration: 5000, subscriptions: new Map([[ topic, filter ]]),
}));

const push = (group, topic, messageListener) => started(new PushConsumer({
  ...common, consumerGroup: named(group), messageListener, longPollingTimeout: 5000,
  subscriptions: new Map([[ named(topic), everything ]]),
}));

async function received(consumer, count, acknowledge = true) {
  const found = [];
  for (const deadline = Date.now() + PATIENT_MS; found.length < count && Date.now() < deadline;) {
    for (const message of await consumer.receive(32, INVISIBLE_MS)) {
      if (acknowledge) await consumer.ack(message);
      found.push(message);
    }
  }
  return found;
}

const bodies = messages => messages.map(message => message.body.toString()).sort();

// Waits for a topic that is there with its first message.
async function deadLetters(group) {
  for (const deadline = Date.now() + PATIENT_MS;; await sleep(100)) {
    let consumer;
    try {
      consumer = await simple(`dead-${group}`, `%DLQ%${named(group)}`);
    } catch (error) {
      if (Date.now() > deadline) throw error;
      continue;
    }
    const found = bodies(await received(consumer, 1));
    await consumer.shutdown();
    return found;
  }
}

const scenarios = {
  async plain() {
    const consumer = await simple('plain', named('plain')), sender = await producer('plain');
    const properties = new Map([[ 'x', 'y' ]]);
    const receipt = await sender.send(made('plain', 'hello', { tag: 'a', keys: [ 'k1', 'k2' ], properties }));
    const [ found ] = await received(consumer, 1);
    await consumer.shutdown();
    await sender.shutdown();
    return {
      message: [
        found.body.toString(), found.tag, found.keys.sort(), Object.fromEntries(found.properties), found.deliveryAttempt,
      ],
      'same id': found.messageId === receipt.messageId,
    };
  },

  async invisible() {
    const sender = await producer('invisible'), consumer = await simple('invisible', named('invisible'));
    await sender.send(made('invisible', 'changed'));
    const [ first ] = await received(consumer, 1, false);
    await consumer.changeInvisibleDuration(first, 1000);
    const [ second ] = await received(consumer, 1);
    return { attempts: [ first.deliveryAttempt, second.deliveryAttempt ], body: second.body.toString() };
  },

  async filters() {
    const sender = await producer('filters');
    for (const [ body, tag, size ] of [[ 'one', 'red', '1' ], [ 'two', 'green', '7' ], [ 'three', 'blue', '9' ]]) {
      await sender.send(made('filters', body, { tag, properties: new Map([[ 'size', size ]]) }));
    }
    const byTag = await simple('tags', named('filters'), new FilterExpression('red || blue'));
    const sql = new FilterExpression('size > 5 AND TAGS <> \'blue\'', FilterType.SQL);
    const bySql = await simple('sql', named('filters'), sql);
    return { tags: bodies(await received(byTag, 2)), sql: bodies(await received(bySql, 1)) };
  },

  // What is in an archive and what is in the log, in the order in which it comes; and what is sent after it.
  async archived() {
    const consumer = await simple('archived', named('archived')), sender = await producer('archived');
    const found = await received(consumer, ARCHIVED);
    await sender.send(made('archived', 'after'));
    found.push(...await received(consumer, 1));
    const listener = new Listener();
    await push('archived-fifo', 'archived-fifo', listener);
    const came = await listener.until(came => came.length >= ARCHIVED);
    return { simple: found.map(message => message.body.toString()), push: came.map(([ body ]) => body) };
  },

  async fifo() {
    const listener = new Listener(), sender = await producer('fifo');
    await push('fifo', 'fifo', listener);
    for (const body of [ 'f0', 'f1', 'fails once', 'f3', 'f4', 'fails', 'f6' ]) {
      await sender.send(made('fifo', body, { messageGroup: 'g' }));
    }
    const came = await listener.until(all => all.length >= 9);
    return { came, dead: await deadLetters('fifo') };
  },

  async delay() {
    const listener = new Listener(), sender = await producer('delay'), now = Date.now();
    await push('delay', 'delay', listener);
    const at = ms => ({ deliveryTimestamp: new Date(ms) });
    await sender.send(made('delay', 'past', at(1000)));
    const recalled = await sender.send(made('delay', 'recalled', at(now + 8000)));
    const answer = await sender.recallMessage(named('delay'), recalled.recallHandle);
    await sender.send(made('delay', 'due', at(now + 9000)));
    const came = await listener.untilBodies('past', 'due');
    return { came, early: Date.now() < now + 9000, recalled: answer.messageId === recalled.messageId };
  },

  async transaction() {
    const listener = new Listener(), asked = new Listener();
    const checker = {
      async check(message) {
        await asked.consume(message);
        // Who is slow may be asked before it commits.
        const isGood = [ 'checked', 'commit' ].includes(message.body.toString());
        return isGood ? TransactionResolution.COMMIT : TransactionResolution.ROLLBACK;
      },
    };
    const sender = await producer('transaction', { checker });
    await push('transaction', 'transaction', listener);
    for (const body of [ 'checked', 'dropped' ]) await sender.send(made('transaction', body), sender.beginTransaction());
    for (const end of [ 'commit', 'rollback' ]) {
      const begun = sender.beginTransaction();
      await sender.send(made('transaction', end), begun);
      await begun[end]();
    }
    const came = await listener.untilBodies('checked', 'commit');
    return { came, asked: await asked.untilBodies('checked', 'dropped') };
  },

  async retries() {
    const listener = new Listener(), sender = await producer('retries');
    await push('retries', 'retries', listener);
    for (const body of [ 'fails once', 'fails' ]) await sender.send(made('retries', body));
    const dead = await deadLetters('retries');
    return { came: (await listener.until(all => all.length >= 4)).sort(), dead };
  },

  async refused() {
    const sender = await producer('plain'), told = {};
    const attempts = { type: made('plain', 'x', { messageGroup: 'g' }), topic: made('nowhere', 'x') };
    for (const [ name, message ] of Object.entries(attempts)) {
      try {
        await sender.send(message);
      } catch (error) {
        told[name] = error.message;
      }
    }
    return told;
  },

  // Bodies that clients of the other protocol compressed; and a long one of ours.
  async crossed() {
    const consumer = await simple('crossed', named('crossed')), sender = await producer('long');
    await sender.send(made('long', `${prefix} `.repeat(4000)));
    const found = await received(consumer, 3);
    return { came: found.map(({ body }) => [ body.toString().slice(0, 4), body.length ]).sort() };
  },

  // Send and consume through a restart; every body is the time it was sent at, in ms.
  async load() {
    const came = { push: new Set(), simple: new Set() }, answered = new Set();
    let isStopped = false, isOver = false;
    const note = (how, { body }) => {
      came[how].add(body.toString());
      tell(how, body.toString());
    };
    const sender = await producer('load'), consumer = await simple('load-simple', named('load'));
    await push('load-push', 'load', {
      async consume(message) {
        note('push', message);
        return ConsumeResult.SUCCESS;
      },
    });
    const take = async () => {
      while (!isOver) {
        try {
          for (const message of await consumer.receive(32, LOAD_INVISIBLE_MS)) {
            note('simple', message);
            await consumer.ack(message);
          }
        } catch { // the endpoint is away
          await sleep(100);
        }
      }
    };
    take();
    process.stdin.on('end', () => { isStopped = true; }).resume();
    while (!isStopped) {
      const body = String(Date.now());
      try {
        await sender.send(made('load', body));
        answered.add(body);
      } catch { /* the endpoint is away */ }
      await sleep(100);
    }
    const missing = how => [ ...answered ].filter(body => !came[how].has(body)).length;
    await waitFor(() => missing('push') + missing('simple') === 0);
    isOver = true;
    return { push: missing('push'), simple: missing('simple') };
  },
};

function tell(name, facts) {
  console.log(JSON.stringify([ name, facts ]));
}

async function run(name) {
  try {
    tell(name, await scenarios[name]());
  } catch (error) {
    tell(name, { error: String(error.cause ?? error) });
  }
}

Promise.all(wanted.map(run)).then(() => process.stdout.write('', () => process.exit(0))); // not after the long polls
