//! One completion: turns its tokens into the pieces of text that a client gets.

use std::collections::VecDeque;
use std::sync::Arc;

use dsv4_kv_model::sample::Picked;
use dsv4_kv_model::sequence::{Finish, Generated};
use dsv4_kv_model::text::{Text, TextStream};
use futures_util::stream::{self, Stream};

use crate::accepted::{Event, Events};
use crate::echo::Echo;
use crate::error::Failure;
use crate::queue::Queue;
use crate::stop::StopFilter;

/// The settings for turning tokens into pieces.
#[derive(Clone, Debug)]
pub struct Style {
    /// The tokenizer.
    pub text: Arc<Text>,
    /// Texts that end a completion.
    pub stops: Vec<String>,
    /// Tokens that end a completion.
    pub end: Vec<u32>,
    /// Whether the client gets the tokens with their log probabilities.
    pub logprobs: bool,
    /// Whether the client gets the prompt in front of the completion.
    pub echo: bool,
}

/// Why a completion has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// A stop text, or a token that ends it.
    Stop,
    /// It has `max_tokens` tokens.
    Length,
}

/// A token, its log probability, and the alternatives at its position.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenInfo {
    /// Its text.
    pub token: String,
    /// The logarithm of its probability; `None` for the first token of a prompt.
    pub logprob: Option<f32>,
    /// The most likely tokens at its position, and the token itself, with their log probabilities.
    pub top: Vec<(String, f32)>,
    /// Characters of the text before it; the text begins with the prompt if that is echoed.
    pub offset: usize,
}

/// The new part of a completion.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Piece {
    /// The number of the completion in its request.
    pub index: usize,
    /// The text that follows the earlier pieces.
    pub text: String,
    /// Tokens whose text begins in the text that was sent so far, and that no earlier piece had.
    pub tokens: Vec<TokenInfo>,
    /// Number of tokens generated since the last piece, including end tokens and tokens whose text is held back.
    pub generated: usize,
    /// Tokens of the prompt that were in the cache; not 0 in the first piece only.
    pub cached: usize,
    /// Set in the last piece.
    pub finish: Option<Reason>,
}

/// Turns the events of completion `index`, which `queue` has accepted, into its pieces. The first one begins with the
/// prompt, if that is echoed.
pub fn pieces(
    index: usize,
    (style, echo): (Arc<Style>, Option<Arc<Echo>>),
    queue: Arc<Queue>,
    events: Events,
) -> impl Stream<Item = Result<Piece, Failure>> + Send {
    let choice = Choice::new(index, style, echo);
    stream::unfold(Some((choice, queue, events)), |state| async {
        let (mut choice, queue, mut events) = state?;
        loop {
            let piece = match events.recv().await {
                Some(Event::Admitted { reused }) => {
                    choice.cached = reused;
                    continue;
                }
                Some(Event::Prompt(token)) => {
                    choice.prompt_token(&token);
                    continue;
                }
                Some(Event::Token(token)) => choice.token(&token),
                Some(Event::Finished(finish)) => choice.finish(finish),
                Some(Event::Failed(failure)) => return Some((Err(failure), None)),
                None => return Some((Err(queue.failure()), None)),
            };
            if piece.finish.is_some() {
                // Dropping the receiver cancels the sequence, which a stop text may have ended early.
                return Some((Ok(choice.sent(piece)), None));
            }
            if !piece.text.is_empty() || !piece.tokens.is_empty() {
                return Some((Ok(choice.sent(piece)), Some((choice, queue, events))));
            }
        }
    })
}

/// A completion that is under way.
struct Choice {
    index: usize,
    style: Arc<Style>,
    /// The prompt, until the first piece is sent, if it is echoed.
    echo: Option<Arc<Echo>>,
    /// Its tokens that have come so far.
    prompt: Vec<TokenInfo>,
    /// Tokens of the prompt that were in the cache, until the first piece is sent.
    cached: usize,
    stream: TextStream,
    filter: StopFilter,
    /// Characters that were decoded so far, and characters that were passed on; both with those of the prompt.
    decoded: usize,
    passed: usize,
    /// Tokens whose text was not passed on yet.
    tokens: VecDeque<TokenInfo>,
    /// Tokens since the last piece.
    generated: usize,
}

impl Choice {
    fn new(index: usize, style: Arc<Style>, echo: Option<Arc<Echo>>) -> Self {
        let filter = StopFilter::new(&style.stops);
        // Nothing predicts the first token.
        let first = |echo: &Arc<Echo>| TokenInfo {
            token: style.text.name(echo.first),
            logprob: None,
            top: Vec::new(),
            offset: 0,
        };
        let prompt = echo.as_ref().filter(|_| style.logprobs).map(first);
        let before = echo.as_ref().map_or(0, |echo| echo.text.chars().count());
        Self {
            index,
            style,
            echo,
            prompt: Vec::from_iter(prompt),
            cached: 0,
            stream: TextStream::default(),
            filter,
            decoded: before,
            passed: before,
            tokens: VecDeque::new(),
            generated: 0,
        }
    }

    /// Takes the next token of the prompt.
    fn prompt_token(&mut self, token: &Generated) {
        if let Some(echo) = &self.echo {
            let info = self.info(token, echo.offsets[self.prompt.len()]);
            self.prompt.push(info);
        }
    }

    fn token(&mut self, token: &Generated) -> Piece {
        self.generated += 1;
        let id = token.picked.token;
        let ends = self.style.end.contains(&id);
        // Clients that score a prompt find its end by the number of tokens behind it.
        if self.style.logprobs && (!ends || self.style.echo) {
            self.tokens.push_back(self.info(token, self.decoded));
        }
        if ends {
            return Piece::default();
        }
        let text = self.stream.push(&self.style.text, id);
        self.push(&text)
    }

    fn finish(&mut self, finish: Finish) -> Piece {
        let text = self.stream.finish();
        let mut last = self.push(&text);
        if last.finish.is_none() {
            let held = self.filter.finish();
            let reason = match finish {
                Finish::Length => Reason::Length,
                Finish::End => Reason::Stop,
            };
            let rest = self.piece(held, Some(reason));
            last.text += &rest.text;
            last.tokens.extend(rest.tokens);
            last.generated += rest.generated;
            last.finish = rest.finish;
            last.tokens.extend(self.tokens.drain(..));
        }
        last
    }

    /// Filters decoded text for stop texts.
    fn push(&mut self, text: &str) -> Piece {
        self.decoded += text.chars().count();
        let passed = self.filter.push(text);
        self.piece(passed.text, passed.stopped.then_some(Reason::Stop))
    }

    /// A piece as it is sent: the first one has the prompt in front, if that is echoed.
    fn sent(&mut self, mut piece: Piece) -> Piece {
        piece.cached = std::mem::take(&mut self.cached);
        if let Some(echo) = self.echo.take() {
            piece.text.insert_str(0, &echo.text);
            let behind = std::mem::replace(&mut piece.tokens, std::mem::take(&mut self.prompt));
            piece.tokens.extend(behind);
        }
        piece
    }

    fn piece(&mut self, text: String, finish: Option<Reason>) -> Piece {
        self.passed += text.chars().count();
        let begun = self.tokens.iter().take_while(|token| token.offset < self.passed).count();
        let generated = match text.is_empty() && begun == 0 && finish.is_none() {
            // This piece is not sent, so its tokens are counted in the next one.
            true => 0,
            false => std::mem::take(&mut self.generated),
        };
        Piece {
            index: self.index,
            text,
            tokens: self.tokens.drain(..begun).collect(),
            generated,
            cached: 0,
            finish,
        }
    }

    fn info(&self, token: &Generated, offset: usize) -> TokenInfo {
        let text = |picked: &Picked| self.style.text.name(picked.token);
        let Generated { picked, top } = token;
        let own = (text(picked), picked.logprob);
        // Several tokens can have the same text. Keep the sampled token, else the most likely one.
        let mut named = vec![own.clone()];
        for (name, logprob) in top.iter().map(|picked| (text(picked), picked.logprob)) {
            if !named.iter().any(|(other, _)| *other == name) {
                named.push((name, logprob));
            }
        }
        TokenInfo { token: own.0, logprob: Some(own.1), top: named, offset }
    }
}
